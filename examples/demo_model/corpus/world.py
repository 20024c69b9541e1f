"""Countries of the world: 193 UN member states, Vatican City and Palestine.

Names are common names in ASCII. For a country with several capitals, or on two continents, the most commonly given one
is used.
"""

from __future__ import annotations

from typing import NamedTuple


class Country(NamedTuple):
    name: str
    name_zh: str
    capital: str
    capital_zh: str
    continent: str

    @property
    def in_text(self) -> str:
        """English name in running text, with an article if needed: "the Netherlands", "Canada"."""
        return f"the {self.name}" if self.name in WITH_ARTICLE else self.name

    @property
    def continent_zh(self) -> str:
        return CONTINENTS[self.continent]


CONTINENTS = {
    "Africa": "非洲",
    "Asia": "亚洲",
    "Europe": "欧洲",
    "North America": "北美洲",
    "South America": "南美洲",
    "Oceania": "大洋洲",
}

WITH_ARTICLE = frozenset(
    (
        "Bahamas",
        "Central African Republic",
        "Comoros",
        "Dominican Republic",
        "Gambia",
        "Maldives",
        "Marshall Islands",
        "Netherlands",
        "Philippines",
        "Republic of the Congo",
        "Solomon Islands",
        "United Arab Emirates",
        "United Kingdom",
        "United States",
    )
)

AFRICA = (
    ("Algeria", "阿尔及利亚", "Algiers", "阿尔及尔"),
    ("Angola", "安哥拉", "Luanda", "罗安达"),
    ("Benin", "贝宁", "Porto-Novo", "波多诺伏"),
    ("Botswana", "博茨瓦纳", "Gaborone", "哈博罗内"),
    ("Burkina Faso", "布基纳法索", "Ouagadougou", "瓦加杜古"),
    ("Burundi", "布隆迪", "Gitega", "基特加"),
    ("Cameroon", "喀麦隆", "Yaounde", "雅温得"),
    ("Cape Verde", "佛得角", "Praia", "普拉亚"),
    ("Central African Republic", "中非共和国", "Bangui", "班吉"),
    ("Chad", "乍得", "N'Djamena", "恩贾梅纳"),
    ("Comoros", "科摩罗", "Moroni", "莫罗尼"),
    ("DR Congo", "刚果民主共和国", "Kinshasa", "金沙萨"),
    ("Djibouti", "吉布提", "Djibouti", "吉布提"),
    ("Egypt", "埃及", "Cairo", "开罗"),
    ("Equatorial Guinea", "赤道几内亚", "Malabo", "马拉博"),
    ("Eritrea", "厄立特里亚", "Asmara", "阿斯马拉"),
    ("Eswatini", "斯威士兰", "Mbabane", "姆巴巴内"),
    ("Ethiopia", "埃塞俄比亚", "Addis Ababa", "亚的斯亚贝巴"),
    ("Gabon", "加蓬", "Libreville", "利伯维尔"),
    ("Gambia", "冈比亚", "Banjul", "班珠尔"),
    ("Ghana", "加纳", "Accra", "阿克拉"),
    ("Guinea", "几内亚", "Conakry", "科纳克里"),
    ("Guinea-Bissau", "几内亚比绍", "Bissau", "比绍"),
    ("Ivory Coast", "科特迪瓦", "Yamoussoukro", "亚穆苏克罗"),
    ("Kenya", "肯尼亚", "Nairobi", "内罗毕"),
    ("Lesotho", "莱索托", "Maseru", "马塞卢"),
    ("Liberia", "利比里亚", "Monrovia", "蒙罗维亚"),
    ("Libya", "利比亚", "Tripoli", "的黎波里"),
    ("Madagascar", "马达加斯加", "Antananarivo", "塔那那利佛"),
    ("Malawi", "马拉维", "Lilongwe", "利隆圭"),
    ("Mali", "马里", "Bamako", "巴马科"),
    ("Mauritania", "毛里塔尼亚", "Nouakchott", "努瓦克肖特"),
    ("Mauritius", "毛里求斯", "Port Louis", "路易港"),
    ("Morocco", "摩洛哥", "Rabat", "拉巴特"),
    ("Mozambique", "莫桑比克", "Maputo", "马普托"),
    ("Namibia", "纳米比亚", "Windhoek", "温得和克"),
    ("Niger", "尼日尔", "Niamey", "尼亚美"),
    ("Nigeria", "尼日利亚", "Abuja", "阿布贾"),
    ("Republic of the Congo", "刚果共和国", "Brazzaville", "布拉柴维尔"),
    ("Rwanda", "卢旺达", "Kigali", "基加利"),
    ("Sao Tome and Principe", "圣多美和普林西比", "Sao Tome", "圣多美"),
    ("Senegal", "塞内加尔", "Dakar", "达喀尔"),
    ("Seychelles", "塞舌尔", "Victoria", "维多利亚"),
    ("Sierra Leone", "塞拉利昂", "Freetown", "弗里敦"),
    ("Somalia", "索马里", "Mogadishu", "摩加迪沙"),
    ("South Africa", "南非", "Pretoria", "比勒陀利亚"),
    ("South Sudan", "南苏丹", "Juba", "朱巴"),
    ("Sudan", "苏丹", "Khartoum", "喀土穆"),
    ("Tanzania", "坦桑尼亚", "Dodoma", "多多马"),
    ("Togo", "多哥", "Lome", "洛美"),
    ("Tunisia", "突尼斯", "Tunis", "突尼斯市"),
    ("Uganda", "乌干达", "Kampala", "坎帕拉"),
    ("Zambia", "赞比亚", "Lusaka", "卢萨卡"),
    ("Zimbabwe", "津巴布韦", "Harare", "哈拉雷"),
)
ASIA = (
    ("Afghanistan", "阿富汗", "Kabul", "喀布尔"),
    ("Armenia", "亚美尼亚", "Yerevan", "埃里温"),
    ("Azerbaijan", "阿塞拜疆", "Baku", "巴库"),
    ("Bahrain", "巴林", "Manama", "麦纳麦"),
    ("Bangladesh", "孟加拉国", "Dhaka", "达卡"),
    ("Bhutan", "不丹", "Thimphu", "廷布"),
    ("Brunei", "文莱", "Bandar Seri Begawan", "斯里巴加湾市"),
    ("Cambodia", "柬埔寨", "Phnom Penh", "金边"),
    ("China", "中国", "Beijing", "北京"),
    ("East Timor", "东帝汶", "Dili", "帝力"),
    ("Georgia", "格鲁吉亚", "Tbilisi", "第比利斯"),
    ("India", "印度", "New Delhi", "新德里"),
    ("Indonesia", "印度尼西亚", "Jakarta", "雅加达"),
    ("Iran", "伊朗", "Tehran", "德黑兰"),
    ("Iraq", "伊拉克", "Baghdad", "巴格达"),
    ("Israel", "以色列", "Jerusalem", "耶路撒冷"),
    ("Japan", "日本", "Tokyo", "东京"),
    ("Jordan", "约旦", "Amman", "安曼"),
    ("Kazakhstan", "哈萨克斯坦", "Astana", "阿斯塔纳"),
    ("Kuwait", "科威特", "Kuwait City", "科威特城"),
    ("Kyrgyzstan", "吉尔吉斯斯坦", "Bishkek", "比什凯克"),
    ("Laos", "老挝", "Vientiane", "万象"),
    ("Lebanon", "黎巴嫩", "Beirut", "贝鲁特"),
    ("Malaysia", "马来西亚", "Kuala Lumpur", "吉隆坡"),
    ("Maldives", "马尔代夫", "Male", "马累"),
    ("Mongolia", "蒙古", "Ulaanbaatar", "乌兰巴托"),
    ("Myanmar", "缅甸", "Naypyidaw", "内比都"),
    ("Nepal", "尼泊尔", "Kathmandu", "加德满都"),
    ("North Korea", "朝鲜", "Pyongyang", "平壤"),
    ("Oman", "阿曼", "Muscat", "马斯喀特"),
    ("Pakistan", "巴基斯坦", "Islamabad", "伊斯兰堡"),
    ("Palestine", "巴勒斯坦", "Ramallah", "拉姆安拉"),
    ("Philippines", "菲律宾", "Manila", "马尼拉"),
    ("Qatar", "卡塔尔", "Doha", "多哈"),
    ("Saudi Arabia", "沙特阿拉伯", "Riyadh", "利雅得"),
    ("Singapore", "新加坡", "Singapore", "新加坡"),
    ("South Korea", "韩国", "Seoul", "首尔"),
    ("Sri Lanka", "斯里兰卡", "Sri Jayawardenepura Kotte", "科特"),
    ("Syria", "叙利亚", "Damascus", "大马士革"),
    ("Tajikistan", "塔吉克斯坦", "Dushanbe", "杜尚别"),
    ("Thailand", "泰国", "Bangkok", "曼谷"),
    ("Turkey", "土耳其", "Ankara", "安卡拉"),
    ("Turkmenistan", "土库曼斯坦", "Ashgabat", "阿什哈巴德"),
    ("United Arab Emirates", "阿联酋", "Abu Dhabi", "阿布扎比"),
    ("Uzbekistan", "乌兹别克斯坦", "Tashkent", "塔什干"),
    ("Vietnam", "越南", "Hanoi", "河内"),
    ("Yemen", "也门", "Sanaa", "萨那"),
)
EUROPE = (
    ("Albania", "阿尔巴尼亚", "Tirana", "地拉那"),
    ("Andorra", "安道尔", "Andorra la Vella", "安道尔城"),
    ("Austria", "奥地利", "Vienna", "维也纳"),
    ("Belarus", "白俄罗斯", "Minsk", "明斯克"),
    ("Belgium", "比利时", "Brussels", "布鲁塞尔"),
    ("Bosnia and Herzegovina", "波斯尼亚和黑塞哥维那", "Sarajevo", "萨拉热窝"),
    ("Bulgaria", "保加利亚", "Sofia", "索非亚"),
    ("Croatia", "克罗地亚", "Zagreb", "萨格勒布"),
    ("Cyprus", "塞浦路斯", "Nicosia", "尼科西亚"),
    ("Czechia", "捷克", "Prague", "布拉格"),
    ("Denmark", "丹麦", "Copenhagen", "哥本哈根"),
    ("Estonia", "爱沙尼亚", "Tallinn", "塔林"),
    ("Finland", "芬兰", "Helsinki", "赫尔辛基"),
    ("France", "法国", "Paris", "巴黎"),
    ("Germany", "德国", "Berlin", "柏林"),
    ("Greece", "希腊", "Athens", "雅典"),
    ("Hungary", "匈牙利", "Budapest", "布达佩斯"),
    ("Iceland", "冰岛", "Reykjavik", "雷克雅未克"),
    ("Ireland", "爱尔兰", "Dublin", "都柏林"),
    ("Italy", "意大利", "Rome", "罗马"),
    ("Latvia", "拉脱维亚", "Riga", "里加"),
    ("Liechtenstein", "列支敦士登", "Vaduz", "瓦杜兹"),
    ("Lithuania", "立陶宛", "Vilnius", "维尔纽斯"),
    ("Luxembourg", "卢森堡", "Luxembourg", "卢森堡"),
    ("Malta", "马耳他", "Valletta", "瓦莱塔"),
    ("Moldova", "摩尔多瓦", "Chisinau", "基希讷乌"),
    ("Monaco", "摩纳哥", "Monaco", "摩纳哥"),
    ("Montenegro", "黑山", "Podgorica", "波德戈里察"),
    ("Netherlands", "荷兰", "Amsterdam", "阿姆斯特丹"),
    ("North Macedonia", "北马其顿", "Skopje", "斯科普里"),
    ("Norway", "挪威", "Oslo", "奥斯陆"),
    ("Poland", "波兰", "Warsaw", "华沙"),
    ("Portugal", "葡萄牙", "Lisbon", "里斯本"),
    ("Romania", "罗马尼亚", "Bucharest", "布加勒斯特"),
    ("Russia", "俄罗斯", "Moscow", "莫斯科"),
    ("San Marino", "圣马力诺", "San Marino", "圣马力诺"),
    ("Serbia", "塞尔维亚", "Belgrade", "贝尔格莱德"),
    ("Slovakia", "斯洛伐克", "Bratislava", "布拉迪斯拉发"),
    ("Slovenia", "斯洛文尼亚", "Ljubljana", "卢布尔雅那"),
    ("Spain", "西班牙", "Madrid", "马德里"),
    ("Sweden", "瑞典", "Stockholm", "斯德哥尔摩"),
    ("Switzerland", "瑞士", "Bern", "伯尔尼"),
    ("Ukraine", "乌克兰", "Kyiv", "基辅"),
    ("United Kingdom", "英国", "London", "伦敦"),
    ("Vatican City", "梵蒂冈", "Vatican City", "梵蒂冈"),
)
NORTH_AMERICA = (
    ("Antigua and Barbuda", "安提瓜和巴布达", "Saint John's", "圣约翰"),
    ("Bahamas", "巴哈马", "Nassau", "拿骚"),
    ("Barbados", "巴巴多斯", "Bridgetown", "布里奇敦"),
    ("Belize", "伯利兹", "Belmopan", "贝尔莫潘"),
    ("Canada", "加拿大", "Ottawa", "渥太华"),
    ("Costa Rica", "哥斯达黎加", "San Jose", "圣何塞"),
    ("Cuba", "古巴", "Havana", "哈瓦那"),
    ("Dominica", "多米尼克", "Roseau", "罗索"),
    ("Dominican Republic", "多米尼加", "Santo Domingo", "圣多明各"),
    ("El Salvador", "萨尔瓦多", "San Salvador", "圣萨尔瓦多"),
    ("Grenada", "格林纳达", "Saint George's", "圣乔治"),
    ("Guatemala", "危地马拉", "Guatemala City", "危地马拉城"),
    ("Haiti", "海地", "Port-au-Prince", "太子港"),
    ("Honduras", "洪都拉斯", "Tegucigalpa", "特古西加尔巴"),
    ("Jamaica", "牙买加", "Kingston", "金斯敦"),
    ("Mexico", "墨西哥", "Mexico City", "墨西哥城"),
    ("Nicaragua", "尼加拉瓜", "Managua", "马那瓜"),
    ("Panama", "巴拿马", "Panama City", "巴拿马城"),
    ("Saint Kitts and Nevis", "圣基茨和尼维斯", "Basseterre", "巴斯特尔"),
    ("Saint Lucia", "圣卢西亚", "Castries", "卡斯特里"),
    ("Saint Vincent and the Grenadines", "圣文森特和格林纳丁斯", "Kingstown", "金斯敦"),
    ("Trinidad and Tobago", "特立尼达和多巴哥", "Port of Spain", "西班牙港"),
    ("United States", "美国", "Washington", "华盛顿"),
)
SOUTH_AMERICA = (
    ("Argentina", "阿根廷", "Buenos Aires", "布宜诺斯艾利斯"),
    ("Bolivia", "玻利维亚", "Sucre", "苏克雷"),
    ("Brazil", "巴西", "Brasilia", "巴西利亚"),
    ("Chile", "智利", "Santiago", "圣地亚哥"),
    ("Colombia", "哥伦比亚", "Bogota", "波哥大"),
    ("Ecuador", "厄瓜多尔", "Quito", "基多"),
    ("Guyana", "圭亚那", "Georgetown", "乔治敦"),
    ("Paraguay", "巴拉圭", "Asuncion", "亚松森"),
    ("Peru", "秘鲁", "Lima", "利马"),
    ("Suriname", "苏里南", "Paramaribo", "帕拉马里博"),
    ("Uruguay", "乌拉圭", "Montevideo", "蒙得维的亚"),
    ("Venezuela", "委内瑞拉", "Caracas", "加拉加斯"),
)
OCEANIA = (
    ("Australia", "澳大利亚", "Canberra", "堪培拉"),
    ("Fiji", "斐济", "Suva", "苏瓦"),
    ("Kiribati", "基里巴斯", "Tarawa", "塔拉瓦"),
    ("Marshall Islands", "马绍尔群岛", "Majuro", "马朱罗"),
    ("Micronesia", "密克罗尼西亚", "Palikir", "帕利基尔"),
    ("Nauru", "瑙鲁", "Yaren", "亚伦"),
    ("New Zealand", "新西兰", "Wellington", "惠灵顿"),
    ("Palau", "帕劳", "Ngerulmud", "恩吉鲁穆德"),
    ("Papua New Guinea", "巴布亚新几内亚", "Port Moresby", "莫尔兹比港"),
    ("Samoa", "萨摩亚", "Apia", "阿皮亚"),
    ("Solomon Islands", "所罗门群岛", "Honiara", "霍尼亚拉"),
    ("Tonga", "汤加", "Nukualofa", "努库阿洛法"),
    ("Tuvalu", "图瓦卢", "Funafuti", "富纳富提"),
    ("Vanuatu", "瓦努阿图", "Port Vila", "维拉港"),
)

COUNTRIES: tuple[Country, ...] = tuple(
    Country(*row, continent)
    for continent, rows in zip(CONTINENTS, (AFRICA, ASIA, EUROPE, NORTH_AMERICA, SOUTH_AMERICA, OCEANIA), strict=True)
    for row in rows
)
